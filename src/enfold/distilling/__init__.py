"""Distilling: what all distillations have in common: teachers and what they said, lessons, students and starts."""

from enfold.distilling.base import Distillation
from enfold.distilling.dirichlet import Dirichlet
from enfold.distilling.lesson import Lesson, Lessons
from enfold.distilling.recorded import Recorded
from enfold.distilling.teacher import Teacher

__all__ = ["Dirichlet", "Distillation", "Lesson", "Lessons", "Recorded", "Teacher"]
