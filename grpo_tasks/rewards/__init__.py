"""Rewards: what an answer is, the built-in and own reward functions, the worker they run in, and the lab that tries them.

    answers  ->  builtin  ->  registry  ->  serve (child process)  <-  worker  <-  compose  <-  trainer
                                                                         ^-------  lab      <-  probe step

No torch here, and nothing of a text is ever evaluated.
"""
