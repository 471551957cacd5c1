"""What is seen of the buffer's work: traces and their pictures, and `explain`'s sentences."""
