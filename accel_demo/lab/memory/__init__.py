"""`accel-demo memory`: where a training's memory goes, by formula and measured."""
