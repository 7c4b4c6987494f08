"""Files, code and models by their content: hashes, manifests, copies, chat templates; tables in Markdown."""
