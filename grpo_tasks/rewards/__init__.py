"""Rewards: the contract of a reward function, the built-in functions, and the process that all of them run in.

    builtin.py  ->  registry.py  ->  serve.py  <------------  worker.py  <-  suite.py  <-  trainer
                                     (child process)             (parent)  <-  lab

contract.py is the page to read before writing a function. No torch here.
"""
