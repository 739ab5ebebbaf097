// Package deploy checks what is shipped beside the program against the program: every metric that a dashboard, an alert or the
// documentation names exists with those labels, manifests and units say what they must, and the configuration in them loads.
package deploy
