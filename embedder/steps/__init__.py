"""What the pipeline does to each batch: decode and tokenise, then one stage after another."""
