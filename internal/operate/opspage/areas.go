package opspage

// manual is the documentation for operators.
const manual = "https://github.com/outrelay/outrelay/blob/main/docs/operations.md"

// area is a group of pages in the navigation.
type area struct {
	Name  string // for screen readers
	Pages []link
}

// link is the entry of a page in the navigation. If Count is set, the script shows this figure of
// the watcher next to the entry, unless it is 0.
type link struct{ Path, Area, Text, Count string }

// listAreas returns the navigation.
func listAreas() []area {
	return []area{
		{"Relay", []link{
			{"/", "overview", "Overview", "problems"},
			{"/topics", "topics", "Topics", ""},
			{"/nodes", "nodes", "Nodes", ""},
			{"/log", "log", "Audit log", ""},
			{"/control", "control", "Control", ""},
		}},
		{"Events", []link{
			{"/waiting", "waiting", "Waiting", "waiting"},
			{"/dead", "dead", "Dead letters", "dead"},
			{"/scheduled", "scheduled", "Scheduled", ""},
			{"/lookup", "lookup", "Look up", ""},
		}},
		{"Services", []link{
			{"/groups", "groups", "Consumer groups", ""},
			{"/sagas", "sagas", "Sagas", ""},
			{"/inbox", "inbox", "Inbox", ""},
		}},
	}
}
