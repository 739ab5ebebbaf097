package mongodb

import (
	"errors"
	"io"
	"net"
	"reflect"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

// IsDriverTimeout reports whether the database took too long. mongo.IsTimeout is true for every
// timeout, also for that of a handler's call to another service. So IsDriverTimeout calls it only
// for errors of the driver's packages.
func IsDriverTimeout(err error) bool {
	return anyOfDriver(err, func(err error, name string, causes []error) bool {
		// WithTransaction wraps each error that its callback returned too late as a timeout. For
		// these, the cause decides.
		late := name == "timeoutError" && slices.ContainsFunc(causes, func(cause error) bool { return cause != nil })
		return !late && mongo.IsTimeout(err)
	})
}

// IsConnectionLost reports whether the driver had no connection for an operation: the pool was cleared
// because another operation lost its connection, or the network failed for a new connection. Such an
// error has no label, in a transaction neither.
func IsConnectionLost(err error) bool {
	return anyOfDriver(err, func(err error, name string, _ []error) bool {
		switch name {
		case "poolClearedError":
			return true
		case "ConnectionError":
			// A wrong password or certificate is no error of the network.
			return errors.As(err, new(net.Error)) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		}
		return false
	})
}

// anyOfDriver reports whether match is true for err or one of its causes, of those whose types are in the driver's
// packages. It passes the names of the types, because some are in packages without a compatibility
// promise.
func anyOfDriver(err error, match func(err error, name string, causes []error) bool) bool {
	if err == nil {
		return false
	}

	// An error may wrap several causes, so the whole tree is searched.
	var causes []error
	switch typed := err.(type) { //nolint:errorlint // this walks the tree itself
	case interface{ Unwrap() error }:
		causes = []error{typed.Unwrap()}
	case interface{ Unwrap() []error }:
		causes = typed.Unwrap()
	}

	goType := reflect.TypeOf(err)
	if goType.Kind() == reflect.Pointer {
		goType = goType.Elem()
	}
	if strings.HasPrefix(goType.PkgPath(), "go.mongodb.org/mongo-driver/") && match(err, goType.Name(), causes) {
		return true
	}
	return slices.ContainsFunc(causes, func(cause error) bool { return anyOfDriver(cause, match) })
}
