// Package integration holds the tests of hopback with brokers: one package for each subject.
// What the packages share is in internal/suite. The tests of this package are about the
// repository itself: its modules, its imports, and its lists of tests.
package integration
