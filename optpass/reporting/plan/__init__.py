"""The memory plan as a report: its record, and its views in the terminal and on a page."""
