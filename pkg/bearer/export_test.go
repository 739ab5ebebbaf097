package bearer

// Keep is keep, for its test without servers.
var Keep = keep
