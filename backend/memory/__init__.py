"""The memory budget's contact with AOTAutograd and Inductor: the partitioner, and the replay that finds true peaks."""
