"""What makes a published model answer: its code in the artifact, the proof before it is registered, its model card."""
