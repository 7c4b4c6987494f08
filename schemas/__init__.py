"""The shapes of things: configuration, tables, results, metric names, errors. Imports nothing of ours."""
