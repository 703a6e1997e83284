"""Running a training script as it is: started unmodified, watched from within, reported from outside."""
