"""Pages for people: the report of a run and the comparison of two, each one self-contained HTML file."""
