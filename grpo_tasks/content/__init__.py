"""Files known by their content: SHA-256 of files and folders, manifests of a step's outputs, modules. Knows no step."""
