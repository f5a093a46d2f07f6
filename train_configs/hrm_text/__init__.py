"""HRM-Text as published, and beside loops and a plain decoder in miniature."""
