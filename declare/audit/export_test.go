package audit

// CheckUnused is for the tests: a broker isn't needed to see what it refuses.
var CheckUnused = checkUnused
