// Package deploy checks the files that are shipped with the program. All metrics and labels in the
// dashboard, the alerts and the documentation exist. The manifests and units have the required
// settings, and their configuration loads.
package deploy
