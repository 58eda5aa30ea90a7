"""The only place that talks to Dynamo, AOTAutograd and Inductor: entry point, pipeline, cache identity, tracing."""
