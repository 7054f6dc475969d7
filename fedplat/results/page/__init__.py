"""One self-contained web page about a run, its repetitions with other seeds, or a table of runs."""

from .data import page_data
from .html import page_html, write_html
from .table_data import is_table, table_data
from .writing import write_page, write_table_page

__all__ = [
    "is_table",
    "page_data",
    "page_html",
    "table_data",
    "write_html",
    "write_page",
    "write_table_page",
]
