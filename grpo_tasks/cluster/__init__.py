"""Jobs on the nodes of a Ray cluster, which need no disk in common with the driver. The only room that imports Ray.

    driver                                                                          node (actors of jobs.py)
      placement.py            nodes are reserved                                      a private folder
      parcel.py               inputs, what a stage has made  --by content-->          parcel.py
      jobs.py                 processes are started and watched                       `python -m MODULE FOLDER`
      mirror.py               the folder of the step         <--as it is made--       mirror.py

It joins a running cluster and never starts one (connect.py). The meaning of every file is that on one machine.
"""
