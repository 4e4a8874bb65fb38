"""Helpers of several losses, or too long for the file of one."""
