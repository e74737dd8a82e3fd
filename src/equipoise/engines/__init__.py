"""Engines beyond this machine: the runs of a study executed by Ray or Slurm, or printed as commands for anything else.

They share one file system with the process that asks: study directory and prepared data have the same paths for all.
"""
