"""Generated tasks that isolate one ability, for recipes that show what recurrent steps are for."""
