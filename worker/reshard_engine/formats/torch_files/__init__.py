"""The format of plain torch files: any tree with its tensors, read and written again by `reshard slim`."""
