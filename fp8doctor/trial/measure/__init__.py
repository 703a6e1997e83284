"""One variant of the step: built, warmed up, timed in turns with the others, profiled, and proven to be what
its name says."""
