"""Files and code identified by content: SHA-256 of files, folders and modules, manifests of outputs; tables in Markdown."""
