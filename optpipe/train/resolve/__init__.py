"""Re-solving while training: measured op times go into the problem, and better schedules replace the running one."""
