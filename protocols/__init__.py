"""What nodes say to each other and when: messages, codec, and one core per negotiation. No I/O, no torch."""
