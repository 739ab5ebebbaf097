package saga

// Restore makes the event again of which envelope is the stored form.
var Restore = restoreEvent
