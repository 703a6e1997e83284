"""Is FP8 engaged: were layers converted, and do they compute in FP8?"""
