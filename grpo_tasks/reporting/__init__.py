"""The report of a run and the comparison of two runs, each as one self-contained HTML file."""
