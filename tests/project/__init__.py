"""What is true of the checkout: layers, documents, examples, packaging, public names."""
