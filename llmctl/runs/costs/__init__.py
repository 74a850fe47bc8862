"""The cost of a run's attempts: losses of time and steps, and the interval of saves that costs least."""
