"""The tasks of RULER (Hsieh et al. 2024), and of its NIAH tasks one by depth."""
