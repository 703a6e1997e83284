"""What the measured step says: does FP8 pay, and where does the time go?"""
