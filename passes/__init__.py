"""What is known and done about a graph: analyses and transforms. Knows nothing of Dynamo, the CLI or rendering."""
