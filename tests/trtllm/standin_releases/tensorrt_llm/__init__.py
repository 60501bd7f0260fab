"""Stands in for the package of the release STANDIN_VERSION: its classes say what our schema says of it, less what
STANDIN_PLANTED changes (JSON: path -> attributes of the schema, null for a key that is not there)."""

import os

__version__ = os.environ.get("STANDIN_VERSION", "1.3.0rc20")
