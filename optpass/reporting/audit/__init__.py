"""The audit's records, and their views: terminal, Markdown, HTML, SARIF, and the difference from a baseline."""
