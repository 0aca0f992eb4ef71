"""Steps of the pipeline for each batch: decode and tokenise, then one stage after another."""
