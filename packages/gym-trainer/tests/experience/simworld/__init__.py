"""A simulated world for training-free GRPO, frozen before the optimiser was tuned.

Bills are computed by hidden rules about made-up words. `tasks` draws the rules and the questions, `student` answers
a chat request by executing what its prompt states, `teacher` reads chat requests and writes lessons, `language` is
the English that both read. The teacher never sees the hidden rules; the student never sees the reference answers.
See docs/guides/training-free.md for what the world shows and what it cannot show.
"""
