"""From the model's text to what a client sees. Every parser takes text in pieces cut anywhere and gives the same result
for every cut; none knows HTTP, ids, or where the text comes from."""
