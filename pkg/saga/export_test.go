package saga

// Restore returns the event whose stored form is envelope.
var Restore = restoreEvent
