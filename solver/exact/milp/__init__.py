"""The schedule as a mixed-integer linear program, solved by HiGHS (OptPipe, section 4; Zero Bubble, appendix G)."""
