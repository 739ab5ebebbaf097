package mongodb

import (
	"reflect"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

// IsDriverTimeout reports whether the database took too long. mongo.IsTimeout is true for every
// time-out, also for that of a handler's call to another service. So IsDriverTimeout calls it only
// for errors of the driver's packages. It does not compare their types: some types, such as that of
// a failed server selection, are in packages without a compatibility promise.
func IsDriverTimeout(err error) bool {
	if err == nil {
		return false
	}

	// An error may wrap several causes, so the whole tree is searched.
	var causes []error
	switch x := err.(type) { //nolint:errorlint // this walks the tree itself
	case interface{ Unwrap() error }:
		causes = []error{x.Unwrap()}
	case interface{ Unwrap() []error }:
		causes = x.Unwrap()
	}

	t := reflect.TypeOf(err)
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}

	// WithTransaction wraps each error that its callback returned too late as a time-out. For
	// these, the cause decides.
	late := t.Name() == "timeoutError" && slices.ContainsFunc(causes, func(c error) bool { return c != nil })
	if strings.HasPrefix(t.PkgPath(), "go.mongodb.org/mongo-driver/") && !late && mongo.IsTimeout(err) {
		return true
	}
	return slices.ContainsFunc(causes, IsDriverTimeout)
}
