"""Check of our source against the sources of the libraries that it uses, without importing any of them.

`python -m library_contract` (with `tests/helpers` on the path, or `make contract`) fetches the oldest and the newest
supported release of each library and prints what our source uses that a release does not have.

| module | contents |
|---|---|
| `source_tree` | names, classes and signatures of packages, read from their files |
| `inference` | types of expressions, as far as annotations and assignments give them |
| `uses` | names, attributes and arguments of libraries in our source, each checked |
| `table` | uses that no reading of our source shows: through untyped objects, overrides, dictionaries |
| `releases` | supported releases, and their Python files |
"""
