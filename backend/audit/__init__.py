"""Collectors of the audit: what Dynamo did, as records. Nothing here renders, fixes or runs scripts."""
