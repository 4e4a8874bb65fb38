"""The study at an accuracy above 92 %: claims, results and the rate of the machine."""
