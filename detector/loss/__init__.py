"""The detection loss: assignment of boxes to anchors, the terms as sums, and the criterion that joins them.

Nothing in this package divides by a number of images, boxes or positives: `detector.step.step` does, once a window.
"""
