"""The config groups and recipes, as package data: `recipe/` holds runnable recipes, every other folder one group."""
