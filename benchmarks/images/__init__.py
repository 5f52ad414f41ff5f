"""What io_images.py measures: files of images, and who reads and decodes them."""

__all__: list[str] = []
