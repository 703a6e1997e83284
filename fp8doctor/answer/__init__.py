"""What is known of a job's speed in one record, and its sentences. Renderers read nothing else of it."""
