"""Paths and URIs of storage as texts: their parts, and a form without credentials."""

import re
from urllib.parse import quote, unquote


def redact_credentials(uri: str) -> str:
    """Remove keys and passwords from a URI, or from a message that contains one."""
    # The name of a bucket has no colon: text after a colon is a key, even if its special characters are not encoded.
    uri = re.sub(r"(s3a?://)[^/?@:\s]*(?::[^@]*)?@", r"\1", uri)
    return re.sub(r"(://[^/?@:\s]*):[^/?@]*@", r"\1@", uri)


def split_path(path: str) -> tuple[str, str]:
    """Split a path or URI into its parent folder and its name; the query of a URI stays with the folder."""
    if "://" not in path:
        folder, _, name = path.rstrip("/").rpartition("/")
        return folder or ("/" if path.startswith("/") else "."), name
    location, mark, query = path.partition("?")
    folder, _, name = location.rstrip("/").rpartition("/")
    return folder + mark + query, unquote(name)


def join_path(folder: str, *names: str) -> str:
    """Join a folder's path or URI with names: the inverse of `split_path`."""
    if "://" not in folder:
        return "/".join((folder.rstrip("/"), *names))
    location, mark, query = folder.partition("?")
    return "/".join((location.rstrip("/"), *map(quote, names))) + mark + query
